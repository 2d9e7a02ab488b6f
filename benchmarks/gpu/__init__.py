"""`sluice bench gpu`: what a device must do for Sluice, in parts of a few minutes that append to one file of JSON.

`parts` lists the parts, `command` runs them in a process of their own (`worker`), and `record` is the file. A part is a function
of a `Case`, which says on which device and at which sizes it measures: a test runs each of them at tiny sizes on a CPU.
"""
