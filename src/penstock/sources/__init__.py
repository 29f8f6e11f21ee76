"""Rows of files of numbers: sources without rank, epoch or order. See `penstock.plan.source.Source`."""
