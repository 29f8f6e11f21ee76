"""Epoch plans: which samples an epoch has, in which order, and how a consumer goes through them."""
