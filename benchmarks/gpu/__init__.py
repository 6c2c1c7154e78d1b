"""`make gpu`: kernels compiled, tests, other libraries' losses and training steps on one GPU, into one file of JSON.

    stages      the stages, each in a process of its own with a time limit; the command line
    compiled    compiles and checks the kernels of losses, in several processes
    suite       runs the tests that need a card
    sanitized   a step in kernels under compute-sanitizer
    peers       time, memory and errors of losses by batch size: one library in one process
    libraries   the losses of each library
    truth       exact values and gradients of losses, in parts
    steps       training steps of CLIP's ViT-B/32 with each loss
    profiled    `make gpu-profile`: kernels and host calls of one loss, as text
    device      time and memory of a call, in a CUDA graph, too; the card, the versions, the commit

A stage is a function that yields rows. In a row, "error" says why a result is missing or wrong, and "skipped" why there
is none. Without a GPU all of it runs at small sizes on the CPU, to check these programs.
"""
