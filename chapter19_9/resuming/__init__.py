"""Save on N ranks, go on elsewhere: `named` (what a rank has, by names and places that know of no rank), `checkpoint`
(the folder: saving, looking before reading, loading), `view` (what lies in it, drawn)."""
