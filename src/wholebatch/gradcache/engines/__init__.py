"""Engines that synchronize gradients, such as DDP, and the passes of a step in which they must not.

sync_control    the switch of an engine
known           the engines that are known, and the modules that they synchronize
ddp             DistributedDataParallel
fsdp            FSDP, both versions
deepspeed       DeepSpeed, ZeRO 0 to 3
lost_gradients  finds calls that bypass the engine of their parameters, and engines that synchronize too early
"""
