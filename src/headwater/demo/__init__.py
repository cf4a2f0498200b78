"""The demo, `headwater demo`: a small shop in the browser.

`shop` has its database, `application` the functions that the page may call, `trade` the writes that
run by themselves, `assistant` the answers in the chat, `revenue` the streaming view, `site` the
page and its tokens; `opening` starts all of it. The page itself is in `page/`. The demo runs on the
embedded PostgreSQL in a data folder of its own, and does not touch the user's databases.
"""
