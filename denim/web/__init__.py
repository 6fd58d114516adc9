"""What pages share, and the explorer: the capacity plan as a page.

Above the plan and below the server: the explorer needs no engine, and the server's dashboard takes its look
and its charts from here. Every number on a page was computed before the page saw it.
"""
