"""The environment's way from one prefix to another: find, pack, open, relocate, unpack."""
