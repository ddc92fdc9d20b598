"""Sweeps: many jobs, each in a process of its own, whose records survive whatever becomes of any of them.

    store       sweep.json and status.json, read and written
    names       the folder of a job, from what sets it apart
    definition  what makes a sweep the same sweep, for resume
    devices     which device each parallel job may see
    process     one job's process: started, watched, ended
    outcome     how a job ended, from its process and its report
    schedule    jobs over devices, in order
    session     the sweep that this process runs, for Hydra's launcher
    display     the live table, and the one at the end

Nothing here loads torch: the process that watches the jobs must stay small and must not open a device.
"""
