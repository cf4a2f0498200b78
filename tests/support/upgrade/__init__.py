"""A database and a lake that an earlier release made, and how tests open them.

`make` makes them by running a checkout of that release; `shop` is its application; `restore` brings
them back. The files in `data/` were made at the commit that `facts.json` names, the last one before
the tree was restructured.
"""
