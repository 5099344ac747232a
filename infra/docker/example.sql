-- Something to be replicated.
create table public.orders (
    id bigint generated always as identity primary key,
    customer text not null,
    total numeric(12, 2) not null,
    placed_at timestamptz not null default now()
);
insert into public.orders (customer, total)
select 'customer ' || g % 100, g * 1.25 from generate_series(1, 10000) g;
