"""Score a sentence encoder: python evaluate.py model=MODEL [key=value ...]; --help explains.

`whitenedcse evaluate` is the same from any folder; whitenedcse/app/jobs.py has what it does.
"""

from whitenedcse.app import jobs, launch

if __name__ == "__main__":
    launch.start(jobs.evaluate)
