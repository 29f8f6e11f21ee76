"""Images: decoding (`decode`, `region`, `backends`), sizes from file headers (`sizes`), and `transforms`.

Import from the modules.
"""
