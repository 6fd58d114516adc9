"""Word lists of the synthetic tasks."""

NAMES = (
    "Ada Alan Alice Amir Ana Anton Astrid Ben Bruno Carla Carlos Chloe Clara Daniel David Diana Dmitri "
    "Elena Emil Emma Erik Eva Fatima Felix Fiona Frank Grace Greta Hana Hans Hector Helen Henry Hugo "
    "Ida Igor Ines Irene Isaac Ivan Jack James Jane Jonas Julia Karim Kate Kenji Lars Laura Leo Lena "
    "Lily Linda Lucas Lucy Luis Maria Marco Martha Martin Mary Maya Mina Miriam Nadia Nina Nora Olga "
    "Oliver Omar Oscar Paul Pedro Peter Petra Priya Rachel Ravi Rita Robert Rosa Ruth Samuel Sara Simon "
    "Sofia Stefan Susan Tariq Thomas Tom Vera Victor Wei William Yara Yuki Zoe"
).split()
ADJECTIVES = (
    "red blue green yellow black white brown silver golden small large old new tall short round square "
    "heavy light broken wooden iron glass paper stone quiet loud empty full hidden upper lower first "
    "second third northern southern eastern western dark bright narrow wide warm cold"
).split()
NOUNS = (
    "lamp door box key garden bridge tower window table chair engine ship train boat house room wall "
    "road river field forest mountain island valley mirror clock bell drum book letter map coin ring "
    "crown sword shield hat coat shoe cup plate bottle basket wheel rope ladder hammer needle candle "
    "stove gate cellar station library"
).split()
ROLES = (
    "keeper captain doctor teacher baker driver painter singer guard judge nurse pilot farmer sailor "
    "writer printer weaver miller hunter porter gardener carpenter engineer librarian secretary "
    "treasurer messenger"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
NUMBERS = "zero one two three four five six seven eight nine ten".split()
