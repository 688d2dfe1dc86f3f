"""The texts that `speculation.py` asks about: written for it, of the kinds that people bring to a model."""

from __future__ import annotations


def _paragraph(text: str) -> str:
    """In one line, as people paste it."""
    return " ".join(text.split())


HARBOUR = _paragraph("""\
The harbour of Lindvik was built in 1887 by a cooperative of forty fishing families. Its first breakwater, made
of granite blocks from the quarry at Storberg, was 310 metres long and took six years to finish. In the winter
of 1902 a storm broke the outer third of it, and two boats were lost. The cooperative borrowed money from the
bank in Halden and built a second breakwater behind the first, which still stands today. During the 1930s
herring made the town rich: in a good year more than 900 boats landed their catch there, and the salting houses
along the quay employed 1,400 people, most of them women from the villages inland. The herring disappeared in
1957. Within five years half of the salting houses had closed, and the population fell from 6,200 to 3,900. In
1974 the town sold the northern quay to a shipyard, which built ferries for the coast until 1999. Since 2004 the
quay has belonged to the town again. The salting houses were turned into workshops and flats, the old crane was
repaired by volunteers, and a museum of the herring years opened in the largest warehouse in 2011. Today about
sixty boats fish from Lindvik, mostly for cod and shrimp. The museum has 48,000 visitors a year, and the town is
planning a third breakwater, 420 metres long, because the sea in the harbour mouth now rises higher in autumn
storms than it did when the second one was built.
""")

BATTERY = _paragraph("""\
Release notes for the battery service, version 4.2. The service reads the charge of every vehicle in the depot
once a minute and decides which charging points get power. In this version the planner looks ahead twelve hours
instead of four, so that vehicles that leave early in the morning are charged first. The planner now knows three
limits: the limit of the grid connection, which is 630 kilowatts, the limit of each row of charging points,
which is 120 kilowatts, and the limit of each vehicle, which it reads from the vehicle itself. When the sum of
what all vehicles ask for is above the limit of the grid connection, the planner divides the power by departure
time and not evenly as before. A vehicle without a departure time is treated as if it left at six in the
morning. The web page of the depot shows the plan as a chart, and every change of the plan is written to the log
with its reason. Two errors were corrected. A vehicle that was unplugged during the exchange of messages could
keep its place in the plan until midnight; now it loses it after ninety seconds. The energy counter of the
second row counted twice when the service was started anew; the counter is now kept in the database. Before the
update, stop the service and copy the database. The update changes the table of vehicles and takes about four
minutes. Versions before 4.0 have to be updated to version 4.1 first. The next version will read prices of
electricity from the market and move charging into cheaper hours.
""")

LIBRARY = _paragraph("""\
The city library lends books, films, games and tools. A library card is free for everybody who lives in the
city; people from elsewhere pay 24 euros a year. Books are lent for four weeks, films and games for one week,
and tools for three days. Every loan can be extended twice, unless somebody else has reserved the item.
Reservations are free, and the library sends a message when the item is ready; it is then kept at the desk for
seven days. Items that come back late cost 20 cents a day for books and one euro a day for everything else, up
to the price of the item. Children and young people under eighteen pay no late fees. Up to thirty items may be
lent at the same time, but no more than five films and two tools. The library is open from Tuesday to Friday
between ten and seven o'clock and on Saturday between ten and three. On Mondays only the reading room is open,
from noon to six o'clock, and no loans are possible. The return box beside the main door is open day and night.
Tools are returned at the desk, because somebody has to look at them. Lost cards are replaced for five euros.
The reading room has forty desks, twelve of them with computers, and a room for groups of up to eight people
that can be booked for two hours a day. Food is not allowed in the reading room; drinks in closed bottles are.
Visitors who need help with forms, applications or a computer find it every Wednesday between two and five
o'clock at the desk on the second floor.
""")

REPORT = _paragraph("""\
Minutes of the meeting of the river committee on 14 March. Present were Anna Berg, Tomas Kral, Ines Duarte and
Paul Osei; Mara Lund was excused. Anna Berg opened the meeting at nine o'clock and asked for changes of the
agenda; there were none. The first item was the flood of 2 February. Tomas Kral reported that the gauge at the
old bridge had reached 4.82 metres, which is 36 centimetres above the highest level of the last twenty years.
Eleven cellars in the lower town were flooded, and the footpath along the mill was washed away over a length of
70 metres. The damage to public property is estimated at 310,000 euros. The second item was the new pumping
station. Ines Duarte presented three offers, of which the second is the cheapest at 1.24 million euros but needs
fourteen months, while the third costs 1.31 million euros and can be finished in nine. The committee decided by
three votes to one to recommend the third offer to the town council. The third item was the meadow behind the
sports ground, which could hold water during a flood. Paul Osei explained that the farmer who leases it would
agree if the town paid for lost harvests. The committee asked him to prepare a contract before the next meeting.
The fourth item was the warning by telephone, which had reached only 412 of 980 households on 2 February,
because many numbers in the list were old. Tomas Kral will send a letter to all households and ask for their
present numbers. The next meeting will be on 18 April at nine o'clock. Anna Berg closed the meeting at twenty
past eleven.
""")

DOCUMENTS = (HARBOUR, BATTERY, LIBRARY, REPORT)

SUMMARIES = [f"Summarise this text in four sentences, in its own words.\n\n{text}" for text in DOCUMENTS]

_QUESTIONS = (
    (HARBOUR, "How did the town change after the herring disappeared?"),
    (BATTERY, "Which limits does the planner know, and what happens when more power is asked for than there is?"),
    (LIBRARY, "How long may I keep books, films and tools, and what does it cost if they come back late?"),
    (REPORT, "What did the committee decide about the pumping station and the meadow?"),
)
RAG = [
    f"Answer the question from the passage below, and quote the sentences that you rely on.\n\nPassage: {text}\n\n"
    f"Question: {question}"
    for text, question in _QUESTIONS
]

_CHANGES = (
    (HARBOUR, "Write every year in brackets."),
    (BATTERY, 'Replace "vehicle" by "bus" everywhere.'),
    (LIBRARY, 'Replace "library" by "media centre" everywhere.'),
    (REPORT, "Write the names in capital letters."),
)
EDITS = [f"{change} Return the whole text and change nothing else.\n\n{text}" for text, change in _CHANGES]

CHAT = [
    "Hello! I have a free weekend in October and would like to do something outdoors. What do you suggest?",
    "Explain to a twelve-year-old why the sky is blue and why sunsets are red.",
    "My bread never rises properly. What could be wrong, and what should I try first?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
]

# A day's questions, no two of them alike: what is learnt from them serves those after.
CHATS = [
    "What should I think about before I adopt a dog?",
    "I have an interview on Friday for a job in a warehouse. How can I prepare?",
    "How do I remove a red wine stain from a white tablecloth?",
    "My neighbour plays loud music at night. How should I talk to him about it?",
    "Plan a simple dinner for four people, one of whom is vegetarian.",
    "I would like to learn to play the guitar. Where should I begin?",
    "Why do cats purr?",
    "How can I sleep better when I work night shifts?",
    "Explain what inflation is to somebody who has never studied economics.",
    "Write a short dialogue between a baker and a customer who wants a very unusual cake.",
    "How do vaccines work?",
    "What is a good way to remember people's names?",
    "Give me a plan for running five kilometres after eight weeks.",
    "My plant's leaves are turning yellow. What could be the reason?",
    "What is the purpose of a budget, and how do I make one?",
    "How do airplanes fly?",
    "What are good habits for somebody who works from home?",
    "What is photosynthesis?",
    "How can I make my presentation more interesting?",
    "Explain how rainbows are formed.",
    "What does a project manager do?",
    "How is glass made?",
    "What should I pack for a week of hiking in the mountains?",
    "Explain the difference between a virus and a bacterium.",
]

WORKLOADS: dict[str, list[str]] = {"summary": SUMMARIES, "RAG": RAG, "editing": EDITS, "chats": CHATS, "chat": CHAT}
