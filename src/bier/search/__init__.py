"""From vectors to search results: the embedded index and the external engines that share its interface."""

from bier.search.embeddings import Embeddings as Embeddings
from bier.search.embeddings import read_embeddings as read_embeddings
from bier.search.engines import is_store_uri as is_store_uri
from bier.search.engines import open_store as open_store
from bier.search.index import Index as Index
from bier.search.store import Entry as Entry
from bier.search.store import Id as Id
from bier.search.store import Label as Label
from bier.search.store import Neighbours as Neighbours
from bier.search.store import Store as Store
from bier.search.store import Where as Where
