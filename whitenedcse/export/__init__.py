"""What a user does with an encoder: whiten it, and hand it on."""
