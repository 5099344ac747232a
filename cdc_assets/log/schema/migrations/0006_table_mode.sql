-- mode: how the lake table was made (mirror, soft_delete or append); another one takes a new copy.
alter table tables add column mode text not null default 'mirror';
