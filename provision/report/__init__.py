"""``clusterctl report``: one HTML file about runs, which opens without a network. Pure.

- ``data``: a run as the report shows it, from the texts of its nodes' files
- ``curves``: the numbers of a run, packed for the page's program
- ``picture``: curves as SVG, for a browser without scripts
- ``redaction``, ``sensitive``: the same runs without names, addresses and secrets, for a file that leaves the room
- ``page``: the HTML; ``templates/report/`` has its program, its style and uPlot (MIT)
"""

from provision.report.data import NodeData, RunData, read_node, samples_of
from provision.report.page import report_page

__all__ = ["NodeData", "RunData", "read_node", "report_page", "samples_of"]
