"""The data pipeline on Spark: every change into a Delta lake.

    java       finds a Java, or supplies one from a wheel
    session    the Spark session and its settings
    offsets    how far a stream has come: positions, and cuts inside a read
    source     `format("headwater")`: the log as a PySpark data source
    planning   what a batch of it reads
    reading    what a worker does: a part of the log as Arrow
    doctor     what of all this is there

Installed with `headwater[spark]`.
"""
