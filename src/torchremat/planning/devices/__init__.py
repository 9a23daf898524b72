"""A step that is profiled without being run, for a device that is only described.

device.py       the description of a device, as data
kernels.py      seconds and bytes of kernels, by their signatures
calibration.py  this machine as a device
overheads.py    what regions and policies take by themselves, on this machine
machines.py     the machine that a step is profiled on: this one, or a described one
cuda.py         functions that dispatch differently on CUDA and on the CPU
fakes.py        model, step and optimizer without data
"""
