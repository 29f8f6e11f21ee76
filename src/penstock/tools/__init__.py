"""Tools that look at data and runs from outside: the command line, the doctor, profiler, planner and shuffle quality.

They may import every other part of Penstock. No other part imports them.
"""
