"""Tools for tests, of Headwater and of applications: proxies that fail, a gateway process, a
replica, random histories and values. Nothing outside tests and benchmarks imports them.
"""
