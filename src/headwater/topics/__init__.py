"""Topics: one signal, one query, every viewer. Here is what an application declares; the hub does
the rest."""
