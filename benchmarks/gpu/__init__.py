"""`sluice bench gpu`: measures the work that Sluice does on a device, in parts of a few minutes that append to one JSON file.

`parts` lists the parts, `command` runs them in a process of their own (`worker`), and `record` is the file. A part is a function
of a `Case`, which says on which device and at which sizes it measures: a test runs each of them at tiny sizes on a CPU.
"""
