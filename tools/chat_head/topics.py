"""What the questions for a chat model are about, and how they are asked."""

THINGS = """
volcanoes; tides; rainbows; glaciers; coral reefs; deserts; rain forests; hurricanes; the water cycle; tectonic
plates; fossils; dinosaurs; whales; wolves; owls; ants; spiders; butterflies; penguins; octopuses; elephants; bats;
horses; dogs; mushrooms; trees; roses; wheat; rice; potatoes; coffee; tea; chocolate; cheese; bread; olive oil; salt;
sugar; honey bees; the human heart; the lungs; the brain; the immune system; sleep; dreams; memory; vitamins; blood
pressure; the skin; teeth; electricity; magnets; gravity; light; sound; heat; friction; lasers; radio waves;
batteries; solar panels; wind turbines; nuclear power; steam engines; electric cars; airplanes; submarines; bicycles;
bridges; elevators; clocks; telescopes; microscopes; cameras; printers; telephones; satellites; robots; computers; the
internet; search engines; email; passwords; encryption; databases; operating systems; programming languages;
compilers; version control; unit tests; algorithms; recursion; hash tables; binary search; sorting; machine learning;
neural networks; chess; football; tennis; swimming; running; yoga; hiking; camping; gardening; painting; photography;
pottery; the violin; the piano; jazz; opera; theatre; film; poetry; novels; fairy tales; myths; museums; libraries;
schools; universities; hospitals; courts; parliaments; elections; money; banks; taxes; interest; insurance; markets;
trade; factories; farms; cities; villages; islands; rivers; mountains; ancient Egypt; ancient Greece; the Vikings; the
Silk Road; the Renaissance; the printing press; the industrial revolution; the space race; Mars; the Moon; the Sun;
black holes; comets; galaxies; the periodic table; water; iron; gold; carbon; oxygen; acids; crystals; plastics;
recycling; compost; drinking water; air pollution; endangered species; national parks; maps; calendars; alphabets;
translation; sign language; handwriting; zero; prime numbers; fractions; percentages; triangles; circles; probability;
averages; graphs; logic puzzles; magic tricks; board games; card games; holidays; weddings; birthdays; letters
"""
PLACES = """
Japan; Brazil; Egypt; Canada; India; Italy; Kenya; Mexico; Norway; Australia; Peru; Turkey; Vietnam; Spain; Greece;
Iceland; Morocco; New Zealand; Portugal; South Korea; Paris; London; Rome; Berlin; Tokyo; New York; Cairo; Sydney;
Istanbul; Lisbon
"""
PEOPLE = """
Albert Einstein; Isaac Newton; Ada Lovelace; Charles Darwin; Leonardo da Vinci; Cleopatra; Nelson Mandela; Jane
Austen; William Shakespeare; Wolfgang Amadeus Mozart; Frida Kahlo; Galileo Galilei; Alan Turing; Rosa Parks; Johannes
Gutenberg
"""
TASKS = """
ask a colleague for help with a report; invite friends to a garden party; complain about a late delivery; thank a
teacher; apply for a summer job; cancel a gym membership; ask a landlord to repair a window; congratulate a friend on
a new job; announce a team meeting; apologise for missing a call; recommend a restaurant; describe a lost umbrella;
welcome a new member
"""
HOWS = """
boil an egg; make vegetable soup; bake an apple pie; cook rice; grow tomatoes; remove a stain; clean a window; tie a
bow; paint a wall; pack a suitcase; learn to swim; prepare for an exam; give a talk; save money; write a diary; train
a puppy; find a lost key; choose a laptop; back up files; set up a router; stay calm before a test; plan a small
budget; read more books
"""
CHARACTERS = """
a clockmaker; a shy robot; two sisters; a talking cat; an old sailor; a young astronaut; a lost penguin; a baker; a
wizard; a tired king; a curious fox; a postman; a musician; a night guard; a gardener; a small town; a broken bridge;
a secret door
"""
FUNCTIONS = """
counts the vowels in a text; returns the largest number of a list; computes a factorial; checks whether a number is
prime; merges two dictionaries; removes empty lines from a file; converts Celsius to Fahrenheit; flattens a nested
list; finds the most frequent word; generates the first n Fibonacci numbers; reads a CSV file; validates an email
address; swaps two variables; computes the median of a list; groups words by their first letter; measures how long a
call takes; downloads a web page; rotates a matrix; splits a list into chunks; counts words per line; rounds a price
to two digits; formats a date; shuffles a deck of cards; parses a command line; writes JSON to a file; computes
compound interest; finds common elements of two lists
"""
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "Go", "SQL", "bash")

ABOUT_THINGS = (
    "What should everyone know about {}?",
    "Explain {} in simple words.",
    "Tell me three surprising facts about {}.",
    "Write a short paragraph about {}.",
    "Why do {} matter?",
    "Give a brief history of {}.",
    "Make a list of common questions about {}, with answers.",
    "Describe {} to someone who has never heard of them.",
    "What are common misunderstandings about {}?",
    "Compare {} with {}.",
)
ABOUT_PLACES = (
    "What is {} famous for?",
    "Plan a three-day trip to {}.",
    "Describe the food of {}.",
    "What is the climate of {} like?",
    "List five places to see in {}.",
)
ABOUT_PEOPLE = ("Why is {} remembered?", "Tell me about the life of {}.", "What did {} achieve?")
FOLLOW_UPS = (
    "Can you give an example?",
    "Say that in one sentence.",
    "And why is that?",
    "Make it shorter, please.",
    "What else should I know?",
    "Now as a list.",
)


def words_of(text: str) -> list[str]:
    """Returns the entries of one of the lists above."""
    return [" ".join(entry.split()) for entry in text.split(";")]
