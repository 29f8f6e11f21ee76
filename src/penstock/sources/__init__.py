"""Sources of rows in files of numbers, without rank, epoch or order. See `penstock.plan.source.Source`."""
