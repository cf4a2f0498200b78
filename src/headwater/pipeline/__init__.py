"""The data pipeline on Spark: every change into a Delta lake.

    java       finds a Java, or supplies one from a wheel
    warming    an archive of Spark's classes, for a faster start
    training   what Spark does while that is made
    session    the Spark session and its settings
    offsets    how far a stream has come: positions, and cuts inside a read
    source     `format("headwater")`: the log as a PySpark data source
    planning   what a batch of it reads
    taking     a batch of it into files, past Spark's rows
    daemon     where workers come from
    reading    what a worker does: a part of the log as Arrow
    doctor     what of all this is there

    delta      Delta tables, appended to exactly once
    files      files of the lake, in a folder or under a URL
    lake       where the tables of the lake are
    events     every change into the lake
    sink       what a stream writes to
    checkpoints  what a stream remembers, and the lock on a lake
    jobs       runs streams, and starts those that fail again
    progress   how far they are
    maintenance  joins small files, removes what is over
    keeping    takes snapshots while the events stream runs
    retention  removes old events
    application  all of it as a program
    standing   where a running pipeline can be asked
    questions  what is asked
    answers    answers it
    connecting its Spark for other programs, through Spark Connect
    shapes     what tables looked like
    snapshots  the rows of tables at positions
    gaps       what the lake misses
    renewal    the way out where the log no longer reaches back
    state      a table at a moment: a snapshot, and the changes in between
    schemas    images, the JSON of rows, into typed columns
    keys       a row's key as events have it
    conditions our filters, for Spark
    history    the versions of a row
    audit      who changed what, counted
    tail       what the log has and the lake has not yet
    changes    the changes of a table between two moments, in order
    replay     a table from its events once more
    targets    the table that a replay writes to, and how far it has come

    table_reading  tables as they are now, at one position
    views      streaming views

Installed with `headwater[spark]`.
"""
