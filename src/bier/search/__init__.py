"""From vectors to answers: the embedded index and the stores that share its interface. Arrays in, ids out."""

from bier.search.answers import Entry as Entry
from bier.search.answers import Found as Found
from bier.search.answers import Id as Id
from bier.search.answers import Label as Label
from bier.search.answers import Where as Where
from bier.search.embeddings import Embeddings as Embeddings
from bier.search.embeddings import read_embeddings as read_embeddings
from bier.search.index import Index as Index
from bier.search.stores import Store as Store
from bier.search.stores import is_store_uri as is_store_uri
from bier.search.stores import open_store as open_store
