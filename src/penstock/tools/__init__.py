"""Tools around data and training runs: command line, doctor, profiler, planner, shuffle quality and `loader.report()`.

They may import any other part of Penstock, but no other part imports them, except a loader that is asked for a report.
"""
