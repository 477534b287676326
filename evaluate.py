"""Score a sentence encoder: python evaluate.py model=MODEL [key=value ...]; --help explains.

`whitenedcse evaluate` is the same from any folder; whitenedcse/app/evaluate.py has what it does.
"""

from whitenedcse.app.evaluate import evaluate
from whitenedcse.app.start import start

if __name__ == "__main__":
    start(evaluate)
