"""Train a sentence encoder: python train.py [+experiment=NAME] [key=value ...]; --help explains.

`whitenedcse train` is the same from any folder; whitenedcse/app/train.py has what it does.
"""

import sys

try:
    from whitenedcse.app.start import start
    from whitenedcse.app.train import train
except ModuleNotFoundError as error:
    sys.stderr.write(f"error: {error.name} is not installed; pip install -c constraints.txt -e .\n")
    sys.exit(2)
except KeyboardInterrupt:  # the imports take seconds
    sys.exit(130)

if __name__ == "__main__":
    start(train)
