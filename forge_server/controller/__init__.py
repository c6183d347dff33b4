"""The policy loop: groups are drawn, batches assembled, the trainer served, new weights put behind the
proxy.

Everything that must survive is a row; the loop looks at the rows, does the one thing that follows, and
looks again. So it can be killed between any two steps (invariants I8 and I12).
"""
