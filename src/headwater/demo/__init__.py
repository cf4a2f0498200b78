"""The demo, `headwater demo`: a small shop in the browser.

`shop` is its database, `application` what the page may call, `trade` the business that goes on by
itself, `assistant` the one who answers in the chat, `revenue` the streaming view that Spark keeps,
`site` the page and its tokens; `opening` starts all of it. The page itself is in `page/`. It runs
on the embedded PostgreSQL in a data folder of its own, so that trying it leaves the user's
databases alone.
"""
