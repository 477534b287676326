"""Train a sentence encoder: python train.py [+experiment=NAME] [key=value ...]; --help explains.

`whitenedcse train` is the same from any folder; whitenedcse/app/jobs.py has what it does.
"""

from whitenedcse.app import jobs, launch

if __name__ == "__main__":
    launch.start(jobs.train)
