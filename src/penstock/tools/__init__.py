"""Tools around data and training runs: command line, doctor, profiler, planner and shuffle quality.

They may import any other part of Penstock, but no other part imports them.
"""
