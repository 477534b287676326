"""Train a sentence encoder: python train.py [+experiment=NAME] [key=value ...]; --help explains.

`whitenedcse train` is the same from any folder; whitenedcse/app/train.py has what it does.
"""

from whitenedcse.app.start import start
from whitenedcse.app.train import train

if __name__ == "__main__":
    start(train)
