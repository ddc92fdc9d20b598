"""Holds a run against what was measured before, for a machine that must say yes or no.

    limits      `latency_ms.p50 <= +3%`: from text and files to limits
    figures     a figure by its path, from each of several runs
    statistics  a change with its 95% interval, from runs or from pairs of processes
    judge       a limit and an interval -> passed, missed or undecided
    baseline    the file that a later run is held against
    stored      a run against such a file
    side        one version of a program in a process of its own, asked for one sample at a time
    serve       the other end: what answers those questions
    worker      the process of a side: prepares a run, then serves
    interleave  two sides in alternating rounds, in several pairs of processes
    documents   JUnit XML, a Markdown summary, lines for the terminal

No torch is loaded, except in `worker`.
"""
