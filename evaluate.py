"""Score a sentence encoder: python evaluate.py model=MODEL [key=value ...]; --help explains.

`whitenedcse evaluate` is the same from any folder; whitenedcse/app/evaluate.py has what it does.
"""

import sys

try:
    from whitenedcse.app.evaluate import evaluate
    from whitenedcse.app.start import start
except ModuleNotFoundError as error:
    sys.stderr.write(f"error: {error.name} is not installed; pip install -c constraints.txt -e .\n")
    sys.exit(2)
except KeyboardInterrupt:  # the imports take seconds
    sys.exit(130)

if __name__ == "__main__":
    start(evaluate)
