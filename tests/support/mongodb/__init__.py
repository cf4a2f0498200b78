"""A stand-in for a MongoDB server, because none can be installed where these tests run.

It speaks the wire protocol to the real driver, and has an in-memory database, an oplog with cluster
times and change streams with resume tokens in the form that MongoDB gives them. It proves that the
source uses the driver rightly and follows a log of this shape. It cannot prove how a real server
rewrites a pipeline, uses indexes, elects, rolls back, routes in a sharded cluster, checks rights or
authenticates; for that the same tests run against `HEADWATER_TEST_MONGODB_URL`.
"""
