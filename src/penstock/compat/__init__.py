"""Thin modules with the names and arguments of the projects that Penstock succeeds, for programs that move over."""
