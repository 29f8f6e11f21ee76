"""Images: decoding, sizes from file headers, and later augmentation. Import from the modules."""
