"""A page to try an encoder and its whitening."""
