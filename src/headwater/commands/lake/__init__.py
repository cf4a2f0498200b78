"""Commands of the data pipeline and its lake. Questions about data are short, because people type
them daily: `asof`, `history`, `audit`, `replay`. What writes the lake or takes care of it is
`pipeline …`, and what concerns streaming views is `view …`.
"""
