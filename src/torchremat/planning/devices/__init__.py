"""A step that is profiled without being run, for a device that is only described.

device.py       what a device can do, as data
kernels.py      what kernels take, by their signatures
calibration.py  this machine as a device
machines.py     the machine that a step is profiled on: this one, or a described one
cuda.py         what functions do on CUDA and not on the CPU
fakes.py        model, step and optimizer without data
"""
