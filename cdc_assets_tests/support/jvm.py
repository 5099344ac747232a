"""How the JVMs of tests are started."""

# Each test's data are tiny: most of a JVM's time would go into optimizing code that is run once or
# twice. Tests need less than half of the CPU with the first compiler alone; by default it would
# get too small a code cache, and spend its time emptying it.
# A column of a batch overflows at so many bytes in tests; at 2 GB elsewhere.
ARROW_BYTES = 128 * 2**20
QUICK_JVM = {
    "JAVA_TOOL_OPTIONS": (
        "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC"
        f" -Darrow.vector.max_allocation_bytes={ARROW_BYTES}"
    )
}
