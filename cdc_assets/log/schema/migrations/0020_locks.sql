-- Who has a lock: the session that holds the advisory lock "life" as process pid of this server, logged
-- in as role; null: nobody. Once that session is over the row means nothing, so that it may be lost in a
-- crash. wanted_by: the life of a session that waits; until wanted_until nobody else takes the lock.
create table locks (
    source text not null,
    name text not null,
    life bigint,
    pid int,
    role oid,
    wanted_by bigint,
    wanted_until timestamptz,
    primary key (source, name)
);
