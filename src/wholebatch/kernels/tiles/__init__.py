"""The kernels themselves, in Triton, which nothing imports before a kernel is started.

A module that is added here is found by the type checker's settings and by the test of machine code.
"""
