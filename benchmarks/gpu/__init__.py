"""The stages of `gpu_stages.py`: checks, and figures. A stage is a function that yields rows, one for each result.

    device        the device; random features, time and memory of a call; installed packages
    versions      the card, the versions, the commit
    precision     the error of each loss in each precision, in one process
    cases         a loss, PartialFC, gradient caching and collectives on W ranks, against the dense float64 reference
    one_process   these cases in one process, and in a group of one rank
    two_ranks     these cases on two ranks, over NCCL where it allows two ranks on one card, else over gloo
    kernels       the check of kernels, their tests, a sanitizer, and the speed of blocks of several sizes
    figures       time and memory of products, losses, PartialFC and gradient caching
    peers         losses of other libraries beside this library's, each in a process of its own
    plan          predicted against measured time and memory
    report        the tables of all stages in one file

In a row, "error" says why a result is missing or wrong, and "skipped" why there is none. Rows are written to the
stage's JSON one by one, so a failure costs only what would have come later. Only torch is needed.
"""
