-- Since version 20, of the same release, the text of regclass values and their like has the schema. Where one
-- belongs to a table's key, changes don't find the rows that were copied before.
update tables t set state = 'parked', updated_at = now(), reason = format(
    '%s: its key has the type %s, whose text has a schema since this version: changes would miss the rows that were'
    ' copied before. Copy it anew: cdc-assets resync %s.', t.table_name, k.type, t.table_name)
  from schema_version v, tables o,
       lateral (select c ->> 'type' as type from jsonb_path_query(o.columns, '$[*]') c
                 where c ->> 'name' = any(o.key_columns) and c ->> 'type' ~
                       '^reg(class|collation|config|dictionary|oper|operator|proc|procedure|type)(\[\])?$'
                 limit 1) k
 where v.version = 20 and (o.source, o.table_name) = (t.source, t.table_name)
   and t.mode <> 'append' and t.snapshot_lsn is not null and t.state in ('waiting', 'copying', 'streaming')
   and not exists (select from pins p where p.source = t.source and p.consistent_point = t.snapshot_lsn
                      and p.created_at >= v.applied_at);
