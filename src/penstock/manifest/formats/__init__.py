"""The formats of manifests, see `penstock.manifest.formats.base`."""
