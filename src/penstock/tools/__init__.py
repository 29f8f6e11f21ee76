"""Tools around data and training runs: command line, doctor, profiler, planner and shuffle quality.

They may import every other part of Penstock. No other part imports them.
"""
