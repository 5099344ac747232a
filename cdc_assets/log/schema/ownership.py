"""Ownership of the coordination schema, and objects of other roles in it.

Statements in the schema run with our role's rights, and so would another role's trigger, view or
default. So the schema and all that is in it has to belong to our role, to one that it is a member
of, or to a superuser, and no other role may put anything there. The rights that our role has as a
superuser don't count here: a role that it isn't a member of isn't trusted. Read-only, and called
before anything in the schema is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, LiteralString

from psycopg import sql

from cdc_assets.errors import CoordinationError
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.session.connect import Connection

# Objects listed in one message.
_LISTED = 5

# Roles whose objects may run with our rights: ``select oid from trusted``.
TRUSTED: LiteralString = """
recursive me (oid) as (
    select oid from pg_catalog.pg_roles where rolname = current_user
     union
    select m.roleid from pg_catalog.pg_auth_members m join me on m.member = me.oid
     where coalesce((pg_catalog.to_jsonb(m) ->> 'inherit_option')::bool
                    or (pg_catalog.to_jsonb(m) ->> 'set_option')::bool, true)),
trusted (oid) as (
    select oid from me
     union all
    select r.oid from pg_catalog.pg_roles r
     where r.rolsuper
        or r.rolname = 'pg_database_owner'
           and (select d.datdba in (select oid from me) from pg_catalog.pg_database d
                 where d.datname = pg_catalog.current_database()))
"""
_OURS: LiteralString = f"""
{TRUSTED},
space as (select * from pg_catalog.pg_namespace where nspname = %(schema)s),
object (classid, objid) as (
    select d.classid, d.objid from pg_catalog.pg_depend d
      join space on d.refobjid = space.oid
     where d.refclassid = 'pg_catalog.pg_namespace'::pg_catalog.regclass),
relation as (
    select c.* from pg_catalog.pg_class c
      join object o on o.objid = c.oid and o.classid = 'pg_catalog.pg_class'::pg_catalog.regclass)
"""
_OWNER: LiteralString = f"""
with {_OURS}
select pg_catalog.pg_get_userbyid(nspowner)::text, nspowner in (select oid from trusted),
       current_user::text
  from space
"""
# Objects of other roles; pg_shdepend has all owners but the superuser that made the cluster. For
# tables of the schema's owner, also the statement that gives them to our role.
_FOREIGN: LiteralString = f"""
with {_OURS}
select pg_catalog.pg_describe_object(o.classid, o.objid, 0) || ' of '
       || pg_catalog.pg_get_userbyid(s.refobjid),
       (select pg_catalog.format('alter table %%I.%%I owner to %%I;',
                                 nspname, relname, current_user)
          from relation, space
         where relation.oid = o.objid and relkind in ('r', 'p') and relowner = nspowner)
  from object o
  join pg_catalog.pg_shdepend s on s.classid = o.classid and s.objid = o.objid and s.deptype = 'o'
   and s.dbid = (select oid from pg_catalog.pg_database
                  where datname = pg_catalog.current_database())
 where s.refobjid not in (select oid from trusted)
   and o.classid <> 'pg_catalog.pg_default_acl'::pg_catalog.regclass
"""
# No migration makes any of these, or uses a user-defined function, operator or type (Postgres's own
# have no entry in pg_depend). An earlier owner of a table may have.
_PLANTED: LiteralString = f"""
with {_OURS}
select pg_catalog.pg_describe_object('pg_catalog.pg_trigger'::pg_catalog.regclass, t.oid, 0)
  from pg_catalog.pg_trigger t join relation r on r.oid = t.tgrelid
 where not t.tgisinternal
    or t.tgconstrrelid <> 0 and t.tgconstrrelid not in (select oid from relation)
 union
select pg_catalog.pg_describe_object('pg_catalog.pg_rewrite'::pg_catalog.regclass, w.oid, 0)
  from pg_catalog.pg_rewrite w join relation r on r.oid = w.ev_class where r.relkind in ('r', 'p')
 union
select pg_catalog.pg_describe_object('pg_catalog.pg_policy'::pg_catalog.regclass, p.oid, 0)
  from pg_catalog.pg_policy p join relation r on r.oid = p.polrelid
 union
select pg_catalog.pg_describe_object(d.refclassid, d.refobjid, 0) || ' in '
       || pg_catalog.pg_describe_object('pg_catalog.pg_class'::pg_catalog.regclass, part.rel, 0)
  from (select 'pg_catalog.pg_class'::pg_catalog.regclass, oid, oid from relation
         union all
        select 'pg_catalog.pg_class'::pg_catalog.regclass, i.indexrelid, r.oid
          from pg_catalog.pg_index i join relation r on r.oid = i.indrelid
         union all
        select 'pg_catalog.pg_attrdef'::pg_catalog.regclass, a.oid, r.oid
          from pg_catalog.pg_attrdef a join relation r on r.oid = a.adrelid
         union all
        select 'pg_catalog.pg_constraint'::pg_catalog.regclass, k.oid, r.oid
          from pg_catalog.pg_constraint k join relation r on r.oid = k.conrelid)
       part (classid, objid, rel)
  join pg_catalog.pg_depend d on d.classid = part.classid and d.objid = part.objid
 where d.refclassid in ('pg_catalog.pg_proc'::pg_catalog.regclass,
                        'pg_catalog.pg_operator'::pg_catalog.regclass,
                        'pg_catalog.pg_type'::pg_catalog.regclass)
"""
# Privileges of other roles and PUBLIC: in the schema, and on its tables if they may use it.
_GRANTED: LiteralString = f"""
with {_OURS},
users (oid) as (
    select r.oid from space, pg_catalog.pg_roles r
     where r.oid not in (select oid from trusted)
       and not pg_catalog.pg_has_role(r.oid, nspowner, 'MEMBER')
       and pg_catalog.has_schema_privilege(r.oid, space.oid, 'USAGE')
       and (r.rolcanlogin or r.rolname !~ '^pg_')),
granted (privilege, thing, grantee) as (
    select x.privilege_type, 'schema ' || pg_catalog.quote_ident(nspname), x.grantee
      from space, pg_catalog.aclexplode(nspacl) x where x.privilege_type = 'CREATE'
     union
    select x.privilege_type, 'all tables in schema ' || pg_catalog.quote_ident(space.nspname),
           x.grantee
      from space, relation, pg_catalog.aclexplode(relation.relacl) x
     where x.privilege_type in ('TRIGGER', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE')
       and exists (select from users u where x.grantee = 0
                      or pg_catalog.pg_has_role(u.oid, x.grantee, 'MEMBER')))
select privilege in ('CREATE', 'TRIGGER'), coalesce(r.rolname, 'PUBLIC')::text,
       pg_catalog.format('revoke %%s on %%s from %%s;',
           pg_catalog.string_agg(privilege, ', ' order by privilege), thing,
           coalesce(pg_catalog.quote_ident(r.rolname), 'public'))
  from granted left join pg_catalog.pg_roles r on r.oid = grantee
 where grantee not in (select oid from trusted)
 group by thing, r.rolname, privilege in ('CREATE', 'TRIGGER')
 order by 1, 2, 3
"""


def ownership_findings(connection: Connection, schema: str) -> Iterator[Finding]:
    """Findings on what in ``schema`` isn't ours alone; none without a schema. A few milliseconds.

    Errors: objects that may run as our role or pass for ours, and rights to add such.
    """
    which = {"schema": schema}
    row = connection.execute(_OWNER, which).fetchone()
    if row is None:
        return
    owner, trusted, role = row
    name = sql.Identifier(schema).as_string(connection)
    found = connection.execute(_FOREIGN, which).fetchall()
    foreign = [str(what) for what, _ in found]
    planted = [str(what) for (what,) in connection.execute(_PLANTED, which).fetchall()]
    if not trusted:
        gives = [f"alter schema {name} owner to {sql.Identifier(role).as_string(connection)};"]
        gives += sorted(given for _, given in found if given is not None)
        as_it_is = planted or len(gives) <= len(found)
        yield Finding(
            "coordination_foreign",
            "error",
            f"the schema {schema} belongs to the role {owner}, which {role} isn't a member of:"
            " whatever is in it would run with our rights.",
            "Set state.schema to another name, or connect as its owner."
            + ("" if as_it_is else f" If an administrator of yours made it: {' '.join(gives)}"),
        )
        return
    if foreign or planted:
        yield Finding(
            "coordination_planted",
            "error",
            f"in the schema {schema} is what isn't ours: {_listed(sorted(foreign + planted))}.",
            "Drop it there, or give it to the schema's owner if it is harmless; if nothing of ours"
            f" is to be kept: drop schema {name} cascade;",
        )
    granted = connection.execute(_GRANTED, which).fetchall()
    plants, writes = ([g[1:] for g in granted if g[0] is kind] for kind in (True, False))
    if plants:
        yield Finding(
            "coordination_open",
            "error",
            f"{_listed(_who(plants))} may put code into the schema {schema}, which would run with"
            " our rights.",
            " ".join(revoke for _, revoke in plants),
        )
    if writes:
        yield Finding(
            "coordination_shared",
            "warning",
            f"{_listed(_who(writes))} may change what we keep in the schema {schema}.",
            " ".join(revoke for _, revoke in writes),
        )


def refuse_foreign(connection: Connection, schema: str) -> None:
    """Raise CoordinationError unless ``schema`` is ours alone, or isn't there."""
    found = [f for f in ownership_findings(connection, schema) if f.severity == "error"]
    if found:
        raise CoordinationError(
            " ".join(finding.message for finding in found),
            " ".join(finding.remedy for finding in found),
        )


def _who(granted: list[tuple[Any, ...]]) -> list[str]:
    return sorted({str(who) for who, _ in granted})


def _listed(things: list[str]) -> str:
    return ", ".join(things[:_LISTED]) + (", …" if len(things) > _LISTED else "")
