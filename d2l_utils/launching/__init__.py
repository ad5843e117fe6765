"""From a function in a notebook to results of N real ranks, one file a role.

In the notebook's process: `launcher` (the call), `source` (the script; with `definitions` and `code_comparison`, which find a
definition's text and prove it, `names` and `literals`), `environment`, `limits` and `host_limits` (what the machine allows), `helper`
(who starts it), `follow` (until it ends), `output` (what ranks print), `diagnosis` (what went wrong; with `stuck`, who kept whom
waiting), `errors` (what is raised then), `folders` (temporary files), `turns` (what live panels wait for).
Between: `warm` (the helper process), `supervisor` (one above each launch), `rendezvous` (how torchrun's agents meet, on loopback
only).
In a rank: `worker`, with `forked` (what makes a fork like a program), `echo` and `meanings` (of errors) and `collective_state`; what
it leaves behind: `ranks`, and `results`.
Beyond one machine: `recipes` (what to type there) and `machines` (what a rank needs there).
"""
