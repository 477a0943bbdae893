"""Pipeline parallelism: the layers of a stack are divided over the stages of the mesh axis `stage`.

stages.py        which stage stores which layers
timetable.py     the schedules: what each stage computes in each tick
stage_layers.py  the forward and backward pass of the layers of one stage
loop.py          the loop over ticks that executes a timetable
"""
